"""What one GPU shows of this library: `make gpu`."""
