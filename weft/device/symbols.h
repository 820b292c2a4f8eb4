#pragma once

namespace weft::device {

/// Replaces a function in the global offset tables of the torch libraries that are loaded. Returns the number of
/// entries.
int replace_symbol(const char* mangled_name, void* function);

}  // namespace weft::device
