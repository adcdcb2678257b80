"""`lightning-remat plan`: whether a model fits, what that costs and at which batch size, without a GPU or code."""
