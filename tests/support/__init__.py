"""What tests of every kind share: real services, found environments, nothing left behind."""
