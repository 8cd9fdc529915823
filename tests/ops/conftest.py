"""Helpers that lie here can be imported by the tests of the folders below."""
