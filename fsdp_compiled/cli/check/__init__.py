"""`fsdp-compiled check`: whether this package is right on this machine."""
