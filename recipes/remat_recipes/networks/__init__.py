"""Networks of the papers that torchvision does not have; every one can be traced symbolically by torch.fx."""
