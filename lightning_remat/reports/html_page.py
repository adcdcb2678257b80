"""temporary"""
def write_page(result, path, title=""):
    path.write_text("x")
