// Trace records as plain Python values, for pycomm/trace.py. Shared by _C and _c10d.
#pragma once
#include <pybind11/pybind11.h>

#include <cstring>

#include "core/trace.h"

namespace pycomm {

/// Returns one group's trace: its owner, its error, and its records from the oldest to the newest.
inline pybind11::dict trace_records(const Trace& trace) {
  namespace py = pybind11;
  const auto or_none = [](int64_t ns) -> py::object {
    return ns ? py::object(py::int_(ns)) : py::none();
  };
  py::list records;
  for (const OpRecord& record : trace.read()) {
    const OpTag& tag = record.tag;
    const bool peer = tag.op == Op::send || tag.op == Op::recv;
    py::dict entry;
    entry["id"] = record.id;
    entry["op"] = name(tag.op);
    entry["seq"] = tag.seq;
    entry["numel"] = tag.numel;
    entry["bytes"] = tag.numel * size_of(tag.dtype);
    entry["dtype"] = name(tag.dtype);
    entry["redop"] = name(tag.redop);
    entry["root"] = tag.root;
    entry["tag"] = peer ? static_cast<int32_t>(tag.codec) : 0;
    entry["label"] = std::string(tag.label, strnlen(tag.label, sizeof tag.label));
    entry["sent"] = record.sent;
    entry["received"] = record.received;
    entry["algo"] = record.algo;
    entry["state"] = name(record.state);
    entry["issued_ns"] = or_none(record.issued_ns);
    entry["started_ns"] = or_none(record.started_ns);
    entry["ended_ns"] = or_none(record.ended_ns);
    entry["waited_ns"] = record.waited_ns;
    entry["coded_ns"] = record.coded_ns;
    records.append(entry);
  }
  const TraceOwner& owner = trace.owner();
  py::list ranks;
  for (const int rank : owner.global_ranks) ranks.append(rank);
  py::dict result;
  result["group"] = owner.group;
  result["description"] = owner.description;
  result["rank"] = owner.rank;
  result["global_ranks"] = ranks;
  result["error"] = trace.error();
  py::list links;
  for (const LinkUse& use : trace.links()) links.append(py::make_tuple(use.bytes, use.busy_us));
  result["records"] = records;
  result["links"] = links;
  return result;
}

}  // namespace pycomm
