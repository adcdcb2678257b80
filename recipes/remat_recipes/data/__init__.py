"""Data of the recipes: one LightningDataModule a file, each with a `batch_size` that may be changed between runs."""
