// Environment variables: reads them, once. core/option_table.h describes them.
#include "core/env.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <iterator>
#include <system_error>

#include "core/decimal.h"
#include "core/error.h"

namespace pycomm {
namespace {

std::string read(const char* variable) {
  const char* value = std::getenv(variable);
  return value ? value : "";
}

[[noreturn]] void reject(const char* variable, const std::string& value,
                         const std::string& expected) {
  throw Error(std::string(variable) + "=" + value + " is invalid: expected " + expected);
}

/// Thrown by the checks below; says what was expected.
struct Expected {
  std::string what;
};

// Checks: functions from the text of a variable, which is never empty, to the value.

std::string text(const std::string& value) { return value; }

auto words(const std::vector<std::string>& words) {
  return [words](const std::string& value) {
    std::string known;
    for (const std::string& word : words) {
      if (value == word) return value;
      known += (known.empty() ? "" : ", ") + word;
    }
    throw Expected{"one of " + known};
  };
}

auto whole(int low, int high) {
  return [low, high](const std::string& value) {
    char* end = nullptr;
    const long number = std::strtol(value.c_str(), &end, 10);
    if (*end == '\0' && number >= low && number <= high) return static_cast<int>(number);
    throw Expected{"a whole number from " + std::to_string(low) + " to " + std::to_string(high)};
  };
}

Milliseconds seconds(const std::string& value) {
  std::string_view rest = value;
  double seconds = 0;
  if (take_decimal(rest, seconds) && rest.empty() && seconds >= 1e-3 && seconds <= 1e6) {
    return Milliseconds(std::llround(seconds * 1e3));
  }
  throw Expected{"seconds, from 0.001 to 1000000"};
}

std::string link_rate(const std::string& value) {
  try {
    parse_link_rate(value);
  } catch (const Error&) {
    throw Expected{"a rate such as 200mbit, or what is sent/received: 20mbit/50mbit"};
  }
  return value;
}

std::string port_range(const std::string& value) {
  parse_ports(value);
  return value;
}

// A secret, or the file that holds it. Links are followed, since Kubernetes mounts secrets by them;
// what counts is the file that was opened.
std::string secret(const std::string& value) {
  constexpr std::string_view kFile = "file:";
  if (value.compare(0, kFile.size(), kFile) != 0) return value;
  const std::string path = value.substr(kFile.size());
  const auto refuse = [&](const std::string& why) {
    throw Error("PYCOMM_SECRET=" + value + " is refused: " + why);
  };
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) refuse(std::generic_category().message(errno));
  struct stat info = {};
  const bool known = ::fstat(fd, &info) == 0;
  char text[4097];
  const ssize_t bytes = ::read(fd, text, sizeof text);
  ::close(fd);
  if (!known || !S_ISREG(info.st_mode) || bytes < 0) refuse("it is no file that can be read");
  if (info.st_uid != 0 && info.st_uid != ::geteuid()) {
    refuse("it belongs to user " + std::to_string(info.st_uid) + ", who could change it");
  }
  if ((info.st_mode & (S_IWGRP | S_IRWXO)) != 0) {
    refuse("other users can read or write it; run chmod 600 on it");
  }
  std::string secret(text, static_cast<size_t>(bytes));
  if (secret.size() == sizeof text) refuse("it has more than 4096 bytes");
  while (!secret.empty() && (secret.back() == '\n' || secret.back() == '\r')) secret.pop_back();
  if (secret.empty()) refuse("it is empty");
  return secret;
}

/// Throws Error if a variable looks like the secret's and is not: the group would have none.
void refuse_other_secrets() {
  constexpr std::string_view kSecret = "PYCOMM_SECRET";
  for (char** entry = environ; entry && *entry; entry++) {
    const std::string_view text = *entry, name = text.substr(0, text.find('='));
    const bool other = name.size() > kSecret.size() && name.substr(0, kSecret.size()) == kSecret;
    if (other && text.size() > name.size() + 1) {
      throw Error(std::string(name) + " is not read, and the group would have no secret: set " +
                  "PYCOMM_SECRET, or PYCOMM_SECRET=file:PATH if a file holds it");
    }
  }
}

template <typename T, typename Check>
void set(T& option, const char* variable, const Check& check) {
  const std::string value = read(variable);
  if (value.empty()) return;
  try {
    option = check(value);
  } catch (const Expected& expected) {
    reject(variable, value, expected.what);
  }
}

Env read_env() {
  refuse_other_secrets();
  Env env;
#define GROUP_OPTION(type, name, value, variable, check, ...) set(env.name, variable, check)
#define PROCESS_OPTION GROUP_OPTION
#include "core/option_table.h"
  for (const char* variable : {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}) {
    if (env.interface.empty()) env.interface = read(variable);
  }
  return env;
}

}  // namespace

const Env& env() {
  static const Env env = read_env();
  return env;
}

std::vector<OptionRow> option_rows() {
  enum Ranks { any, same };
  std::vector<OptionRow> rows;
#define GROUP_OPTION(type, name, value, variable, check, ranks, acts, meaning, default_text, page) \
  rows.push_back({true, #name, variable, ranks == same, #acts, meaning, default_text, page})
#define PROCESS_OPTION(type, name, value, variable, check, ranks, acts, meaning, default_text, \
                       page)                                                                   \
  rows.push_back({false, #name, variable, ranks == same, #acts, meaning, default_text, page})
#include "core/option_table.h"
  return rows;
}

PortRange parse_ports(const std::string& text) {
  constexpr int kLast = 65535;
  PortRange range;
  if (text.empty()) return range;
  const auto number = [](const std::string& digits) {
    const bool whole = !digits.empty() && digits.size() <= 5 &&
                       digits.find_first_not_of("0123456789") == std::string::npos;
    return whole ? std::stoi(digits) : 0;
  };
  const size_t dash = text.find('-');
  range.first = number(text.substr(0, dash));
  range.last = dash == std::string::npos ? range.first : number(text.substr(dash + 1));
  if (range.first >= 1 && range.first <= range.last && range.last <= kLast) return range;
  reject("PYCOMM_PORTS", text, "a range from 1 to 65535 such as 29600-29700, or one port");
}

bool device_has_one_queue() { return read("CUDA_DEVICE_MAX_CONNECTIONS") == "1"; }

double parse_rate(const std::string& text) {
  struct Unit {
    const char* word;
    double bytes_per_second;
  };
  // Units of tc: "bit" counts bits, "B" counts bytes; a bare number is bytes.
  static constexpr Unit kUnits[] = {{"", 1},           {"bit", 1. / 8},   {"kbit", 1e3 / 8},
                                    {"mbit", 1e6 / 8}, {"gbit", 1e9 / 8}, {"KB", 1e3},
                                    {"MB", 1e6},       {"GB", 1e9}};
  std::string_view rest = text;
  double number = 0;
  if (take_decimal(rest, number)) {
    for (const Unit& unit : kUnits) {
      const double rate = number * unit.bytes_per_second;
      if (rest == unit.word && rate > 0 && std::isfinite(rate)) return rate;
    }
  }
  throw Error("cannot read the rate \"" + text +
              "\": want a positive number and kbit, mbit, gbit, KB, MB or GB, such as 200mbit");
}

LinkRate parse_link_rate(const std::string& text) {
  if (text.empty()) return {};
  const size_t slash = text.find('/');
  const bool one = slash == std::string::npos;
  const double send = parse_rate(text.substr(0, slash));
  return {send, one ? send : parse_rate(text.substr(slash + 1)), one ? send : 0};
}

}  // namespace pycomm
