"""Measuring: how fast the engine is, and how near that is to what the machine allows.

Owns what is counted (bytes, operations) and what is timed. Refuses to judge: figures stand beside their roofs.
"""
