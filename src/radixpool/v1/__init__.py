"""Messages and service stubs generated from protos/radixpool/v1 (never edited by hand)."""
