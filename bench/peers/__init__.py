"""The peers' table: other systems and pycomm train one model over the same emulated links."""
