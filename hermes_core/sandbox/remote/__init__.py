"""What backends share that run `sandbox/local/host` elsewhere: the program that they send there, and its answers."""
