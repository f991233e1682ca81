// Options of a group and of the process, and the environment variables that set them. The table is
// core/option_table.h. Nothing else calls getenv.
#pragma once
#include <string>
#include <vector>

#include "core/deadline.h"
#include "core/types.h"

namespace pycomm {

/// Values of PYCOMM_ALGO; docs/algorithms.md describes them.
constexpr const char* kAlgoNames[] = {"auto",  "flat", "direct", "one_shot",    "two_shot",
                                      "bruck", "ring", "tree",   "hierarchical"};

/// Rates of a link in bytes per second; 0: not known.
struct LinkRate {
  double send = 0, receive = 0;
  double paced = 0;  ///< of an emulated link: the most that a rank sends; 0: it is a real one
};

/// Options of a group, with the defaults of the table.
struct GroupOptions {
#define GROUP_OPTION(type, name, value, ...) type name = value
#include "core/option_table.h"
};

/// Values of the variables, read once, at first use. An invalid value raises Error and names the
/// variable.
struct Env : GroupOptions {
#define PROCESS_OPTION(type, name, value, ...) type name = value
#include "core/option_table.h"
};

PYCOMM_API const Env& env();

/// True if all streams of this process share one queue of a GPU, as Megatron asks for by
/// CUDA_DEVICE_MAX_CONNECTIONS=1: one that is held would stop all others.
PYCOMM_API bool device_has_one_queue();

/// A row of the table, for people.
struct OptionRow {
  bool of_group;
  const char* name;
  const char* variable;
  bool same;         ///< on all ranks
  const char* acts;  ///< what heeds it: each "group", or one whose ranks talk by "tcp"
  const char* meaning;
  const char* default_text;
  const char* page;
};
PYCOMM_API std::vector<OptionRow> option_rows();

/// Ports of TCP, `first` to `last`; 0 to 0: any.
struct PortRange {
  int first = 0, last = 0;
};
/// "29600-29700", "29600", or "" for any. Throws Error.
PYCOMM_API PortRange parse_ports(const std::string& text);

/// "200mbit", "1.5gbit", "10MB" (per second) to bytes per second. Throws Error.
PYCOMM_API double parse_rate(const std::string& text);
/// "200mbit" (an emulated link), "20mbit/50mbit" (what is sent and what is received), or "" if
/// nothing is known. Throws Error.
PYCOMM_API LinkRate parse_link_rate(const std::string& text);

}  // namespace pycomm
