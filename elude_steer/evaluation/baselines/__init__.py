"""What ELUDe is compared with: sparse autoencoders and other dictionaries."""
