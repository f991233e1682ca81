"""Collectives and codecs, timed side by side with those of other libraries."""
