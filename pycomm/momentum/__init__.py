"""A momentum that travels coded, and its second moments by rows and columns."""
