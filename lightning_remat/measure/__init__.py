"""Bytes and seconds: what a device has, what a block takes."""
