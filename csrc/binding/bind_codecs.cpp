// Codecs for Python.
#include "binding/module.h"

namespace pycomm {

void bind_codecs(pybind11::module_&) {}

}  // namespace pycomm
