#pragma once

namespace paceline::python {

// Sends the library's messages to Python's logger "paceline" until the interpreter ends. Needs the
// GIL.
void log_to_python();

}  // namespace paceline::python
