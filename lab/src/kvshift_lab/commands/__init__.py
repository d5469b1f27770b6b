"""The commands of `kvshift`: a folder for each, with its options and the function that takes them."""
