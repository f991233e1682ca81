// Parts of pycomm._C: one function and one file each.
#pragma once
#include <pybind11/pybind11.h>

namespace pycomm {

void bind_core(pybind11::module_& m);        // core/core.cpp: enums, errors, reduce, philox
void bind_codecs(pybind11::module_& m);      // core/codecs.cpp
void bind_coded(pybind11::module_& m);       // core/coded.cpp: buckets whose payloads Python moves
void bind_transports(pybind11::module_& m);  // core/transports.cpp: stores, transports
void bind_communicator(pybind11::module_& m);  // core/communicator.cpp
void bind_device(pybind11::module_& m);        // core/device.cpp: groups of ranks on GPUs
void bind_queue(pybind11::module_& m);         // core/queue.cpp
void bind_schedule(pybind11::module_& m);      // core/schedule.cpp: schedule, seeds of hops
void bind_optimizers(pybind11::module_& m);    // optim/moments.cpp, adamw.cpp

}  // namespace pycomm
