"""The other driver of the core: virtual time, network, disk and faults from one seed."""
