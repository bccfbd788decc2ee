"""Make the two Python environments, from nothing but a Linux machine with a compiler."""
