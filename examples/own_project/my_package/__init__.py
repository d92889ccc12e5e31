"""A package of your own: one LightningModule, one LightningDataModule."""
