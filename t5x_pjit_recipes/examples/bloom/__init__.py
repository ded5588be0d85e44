"""The BLOOM decoder with logical axes, scanned layers and a key/value cache."""
