"""What the recipes are made of: networks, data, Lightning modules, the papers' tables, plots."""
