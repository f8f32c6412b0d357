"""Rates: how fast this machine reads, copies and computes, measured once and cached."""
