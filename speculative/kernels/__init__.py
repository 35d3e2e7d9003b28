"""CPU kernels in C++ and their ctypes bindings. The only room that knows C."""
