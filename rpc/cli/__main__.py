"""`python -m radixpool.rpc.cli` is `radixpool`."""

from radixpool.rpc.cli import main

main(prog_name="radixpool")
