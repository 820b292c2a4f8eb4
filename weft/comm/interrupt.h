#pragma once

namespace weft::comm {

/// Raises if the program was asked to stop, by Ctrl-C say.
using InterruptCheck = void (*)();

/// Every wait of this library calls `check` on the waiting thread, about 20 times a second. Null: no check. The Python
/// binding installs one, so that nothing here knows Python.
void set_interrupt_check(InterruptCheck check);

/// For wait loops: calls the check, unless this thread did within the last 50 ms.
void check_interrupt();

}  // namespace weft::comm
