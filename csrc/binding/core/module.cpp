// Module pycomm._C: the torch-free core for Python. Buffers come in as addresses; the GIL is
// released around every call that may take long. Each topic has one file in binding/core.
#include "binding/core/module.h"

PYBIND11_MODULE(_C, m) {
  m.doc() = "The torch-free core of pycomm: codecs, transports and collectives on addresses.";
  pycomm::bind_core(m);
  pycomm::bind_codecs(m);
  pycomm::bind_coded(m);
  pycomm::bind_stores(m);
  pycomm::bind_communicator(m);
  pycomm::bind_optimizers(m);
}
