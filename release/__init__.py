"""How releases are made: wheels that compile nothing where they are installed."""
