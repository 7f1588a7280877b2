"""Counts under redis-py's lock, beside the Go programs: old.py HOST PORT TURNS"""

import sys
import time

import redis

client = redis.Redis(host=sys.argv[1], port=int(sys.argv[2]))
for _ in range(int(sys.argv[3])):
    # Always with a timeout: without one the key never expires, and if this process
    # dies an operator has to delete it.
    with client.lock("counter-lock", timeout=30, sleep=0.05):
        count = int(client.get("counter") or 0)
        time.sleep(0.001)
        client.set("counter", count + 1)
    time.sleep(0.02)
