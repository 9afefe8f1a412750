"""Answer which eviction policy and how much memory a workload wants, by replaying its trace.

Owns trace readers, workload generators, the replay through `radixpool.radix.RadixCache`, the offline references
(optimum, infinite, none) and the tables, plots and report. Never imports grpc or torch. Every number is a function
of the trace, the policy, the capacity and the seed, except the speed of the replay.
"""
