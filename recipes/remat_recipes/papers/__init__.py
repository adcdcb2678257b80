"""The experiments of the papers, re-run: one file a paper, whose `main` writes tables and plots into a folder."""
