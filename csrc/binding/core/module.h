// Parts of pycomm._C: one function and one file each.
#pragma once
#include <pybind11/pybind11.h>

namespace pycomm {

void bind_core(pybind11::module_& m);    // core/core.cpp: enums, errors, reduce, options
void bind_codecs(pybind11::module_& m);  // core/codecs.cpp
void bind_coded(pybind11::module_& m);   // core/coded.cpp: buckets whose payloads Python moves
void bind_stores(pybind11::module_& m);  // core/stores.cpp: stores, interfaces
void bind_communicator(pybind11::module_& m);  // core/communicator.cpp
void bind_optimizers(pybind11::module_& m);    // optim/moments.cpp

}  // namespace pycomm
