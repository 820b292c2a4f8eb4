#pragma once

namespace weft::comm {

/// Raises if the program was interrupted, for example by Ctrl-C.
using InterruptCheck = void (*)();

/// Installs the check that every wait of this library calls on the waiting thread, about 20 times per second. Null
/// removes it. The Python binding installs one, which keeps this library free of Python.
void set_interrupt_check(InterruptCheck check);

/// For wait loops: runs the check, at most once per 50 ms on each thread.
void check_interrupt();

}  // namespace weft::comm
