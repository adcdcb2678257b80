"""The engine of auto: local search over retention intervals at the true peak."""
