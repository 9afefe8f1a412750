"""`radixpool serve` as a process: ready, refuse, stop, die and come again."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from radixpool.rpc.client import NO_RETRY, Client, ClientOptions
from radixpool.rpc.errors import ManagerUnavailable


def test_ready_line_stop_and_clean_exit(serve, socket_dir):
    manager = serve("--listen", f"unix:{socket_dir}/m.sock", "--num-blocks", "32", "--block-size", "8")
    assert manager.ready == {
        "address": f"unix:{socket_dir}/m.sock",
        "pid": manager.process.pid,
        "num_blocks": 32,
        "block_size": 8,
        "policy": "lru",
    }
    with Client(manager.address) as client, client.acquire(range(20)) as seq:
        assert len(seq.block_table) == 3
    assert manager.terminate() == (0, "")
    assert list(socket_dir.iterdir()) == []


def test_port_zero_is_chosen_by_the_system(serve):
    manager = serve("--listen", "127.0.0.1:0", "--num-blocks", "32")
    assert not manager.address.endswith(":0")
    with Client(manager.address) as client:
        assert client.info().block_size == 16


def test_a_killed_manager_leaves_an_address_that_the_next_one_takes(serve, socket_dir):
    listen = ("--listen", f"unix:{socket_dir}/m.sock", "--num-blocks", "32")
    first = serve(*listen)
    with Client(first.address, options=ClientOptions(retry=NO_RETRY)) as client:
        client.acquire([1, 2, 3])
        first.kill()
        with pytest.raises(ManagerUnavailable):
            client.info()
    second = serve(*listen)
    with Client(second.address) as client:
        assert client.stats().cache.free_blocks == 32
    assert second.terminate()[0] == 0
    assert list(socket_dir.iterdir()) == []


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_second_manager_is_told_so(serve, run_cli, socket_dir, kind):
    first = serve("--listen", f"unix:{socket_dir}/m.sock" if kind == "unix" else "127.0.0.1:0", "--num-blocks", "8")
    second = run_cli("serve", "--listen", first.address, "--num-blocks", "8")
    assert (second.returncode, second.stdout) == (4, "")
    assert second.stderr.startswith("Error: another ")
    assert second.stderr.count("\n") == 1
    with Client(first.address) as client:
        assert client.info().num_blocks == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--num-blocks", "0"), "--num-blocks must be an integer from 1 to 2147483647, got 0"),
        (("--num-blocks", "8", "--block-size", "0"), "--block-size must be an integer from 1 to 65536, got 0"),
        (("--num-blocks", "8", "--policy", "psychic"), "psychic"),
        (
            ("--num-blocks", "8", "--listen", "0.0.0.0:0"),
            "server.listen is '0.0.0.0:0', which other machines can reach",
        ),
        (("--num-blocks", "8", "--listen", "nowhere"), "address must be unix:/path or HOST:PORT"),
    ],
)
def test_values_out_of_range_are_usage_errors(run_cli, arguments, message):
    result = run_cli("serve", *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_the_ready_descriptor_carries_the_address(socket_dir):
    read_end, write_end = os.pipe()
    address = f"unix:{socket_dir}/m.sock"
    command = [sys.executable, "-m", "radixpool.rpc.cli", "serve", "--num-blocks", "8", "--listen", address]
    with subprocess.Popen(
        [*command, "--ready-fd", str(write_end)], pass_fds=[write_end], stdout=subprocess.PIPE, text=True
    ) as process:
        os.close(write_end)
        with os.fdopen(read_end) as ready:
            assert ready.read() == f"{address}\n"
        process.terminate()
        output, _ = process.communicate(timeout=20)
    assert output == f"radixpool manager ready on {address} (8 blocks of 16 tokens, policy lru)\n"
    assert process.returncode == 0


def test_manager_and_client_work_without_torch(socket_dir):
    program = textwrap.dedent(
        f"""
        import sys

        class Block:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in ("torch", "triton", "transformers"):
                    raise ImportError(name + " is blocked")

        sys.meta_path.insert(0, Block())
        from radixpool.rpc.client import NO_RETRY, Client, ClientOptions
        from radixpool.rpc.manager import ManagerOptions, ManagerServer

        server = ManagerServer(ManagerOptions(listen="unix:{socket_dir}/m.sock", num_blocks=8, block_size=4))
        server.start()
        with Client(server.address) as client, client.acquire([1, 2, 3]) as seq:
            print(len(seq.block_table))
        server.stop(0)
        import radixpool.rpc.cli
        radixpool.rpc.cli.main(["--help"], standalone_mode=False)
        """
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("1\nUsage: ")


def test_a_signal_at_the_beginning_of_the_wait_for_it_is_not_lost():
    program = """
    import signal

    from radixpool.rpc.cli.running import stop_on_signals

    stop = stop_on_signals()
    with stop._cond:  # as `stop.wait()` does first; the handler runs here
        signal.raise_signal(signal.SIGTERM)
    assert stop.wait(10)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], timeout=60, check=True)


def test_a_signal_that_another_thread_gets_is_not_lost():
    program = """
    import signal, threading

    from radixpool.rpc.cli.running import stop_on_signals

    stop, ended = stop_on_signals(), threading.Event()
    other = threading.Thread(target=ended.wait)
    other.start()
    threading.Timer(0.3, signal.pthread_kill, (other.ident, signal.SIGTERM)).start()
    stop.wait()
    ended.set()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], timeout=60, check=True)
