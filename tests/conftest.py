"""Puts this folder on the import path, so that tests of all folders share their cases."""
