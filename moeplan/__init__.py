"""moeplan: calibrated gates for Mixture-of-Experts kernels.

Read in pipeline order: traffic (what work: integers), cost (how long: seconds with a band and an origin),
serving (who waits: queues), planning (what to choose), kernels and runners (the only code that knows a device).
"""

__version__ = "0.1.0"
