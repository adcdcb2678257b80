"""LightningModules of the recipes: a loss, a metric and an optimizer around any network of the right output."""
