// Stores and the communicator for Python.
#include "binding/module.h"

namespace pycomm {

void bind_communicator(pybind11::module_&) {}

}  // namespace pycomm
