"""Prove that each of the eight steps took effect, on ranks started for it or in a user's script."""

# Limits of Horovod's check for ranks that do not participate; without effect before ``init``.
STALLED = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "10", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "30"}
