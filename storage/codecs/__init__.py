"""How states become bytes: a codec is one class in one file, and `registry` is the one list of them."""
