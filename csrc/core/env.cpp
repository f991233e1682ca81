// Environment variables: reads them, once. They are documented in env.h.
#include "core/env.h"

#include <cmath>
#include <cstdlib>
#include <initializer_list>

#include "core/decimal.h"
#include "core/error.h"

namespace pycomm {
namespace {

std::string read(const char* variable) {
  const char* value = std::getenv(variable);
  return value ? value : "";
}

[[noreturn]] void reject(const char* variable, const std::string& value, const std::string& want) {
  throw Error(std::string(variable) + "=" + value + " makes no sense: want " + want);
}

/// Parses one of some words; the first one if the variable is not set.
template <typename Words>
std::string read_word(const char* variable, const Words& words) {
  const std::string value = read(variable);
  if (value.empty()) return *std::begin(words);
  std::string known;
  for (const char* word : words) {
    if (value == word) return value;
    known += (known.empty() ? "" : ", ") + std::string(word);
  }
  reject(variable, value, "one of " + known);
}

Milliseconds read_seconds(const char* variable, Milliseconds fallback) {
  const std::string value = read(variable);
  if (value.empty()) return fallback;
  std::string_view rest = value;
  double seconds = 0;
  if (take_decimal(rest, seconds) && rest.empty() && seconds >= 1e-3 && seconds <= 1e6) {
    return Milliseconds(std::llround(seconds * 1e3));
  }
  reject(variable, value, "seconds, from 0.001 to 1000000");
}

int read_int(const char* variable, int fallback, int low, int high) {
  const std::string value = read(variable);
  if (value.empty()) return fallback;
  char* end = nullptr;
  const long number = std::strtol(value.c_str(), &end, 10);
  if (*end == '\0' && number >= low && number <= high) return static_cast<int>(number);
  reject(variable, value,
         "a whole number from " + std::to_string(low) + " to " + std::to_string(high));
}

double read_link() {
  const std::string value = read("PYCOMM_LINK");
  if (value.empty()) return 0;
  try {
    return parse_rate(value);
  } catch (const Error&) {
    reject("PYCOMM_LINK", value, "a rate such as 200mbit, 1gbit or 10MB");
  }
}

std::string read_rate() {
  const std::string value = read("PYCOMM_RATE");
  try {
    parse_link_rate(value);
  } catch (const Error&) {
    reject("PYCOMM_RATE", value, "a rate such as 100mbit, or what is sent/received: 20mbit/50mbit");
  }
  return value;
}

Env read_env() {
  Env env;
  env.transport =
      read_word("PYCOMM_TRANSPORT", std::initializer_list<const char*>{"auto", "shm", "tcp"});
  env.algo = read_word("PYCOMM_ALGO", kAlgoNames);
  env.link_bytes_per_second = read_link();
  env.rate = read_rate();
  env.sockets = read_int("PYCOMM_SOCKETS", env.sockets, 1, 16);
  env.congestion = read("PYCOMM_CONGESTION");
  if (env.congestion.empty()) env.congestion = "auto";
  for (const char* variable : {"PYCOMM_INTERFACE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}) {
    if (env.interface.empty()) env.interface = read(variable);
  }
  env.ports = read("PYCOMM_PORTS");
  parse_ports(env.ports);
  env.advertise = read("PYCOMM_ADVERTISE");
  env.host_id = read("PYCOMM_HOST_ID");
  env.master_addr = read("MASTER_ADDR");
  env.timeout = read_seconds("PYCOMM_TIMEOUT", env.timeout);
  env.secret = read("PYCOMM_SECRET");
  env.tls = read_word("PYCOMM_TLS", std::initializer_list<const char*>{"off", "on"}) == "on";
  env.checksum =
      read_word("PYCOMM_CHECKSUM", std::initializer_list<const char*>{"auto", "payload", "header"});
  env.check = read_word("PYCOMM_CHECK", std::initializer_list<const char*>{"none", "results"});
  env.spin = read_int("PYCOMM_SPIN", env.spin, -1, 1000000000);
  env.trace = read("PYCOMM_TRACE");
  env.trace_size = read_int("PYCOMM_TRACE_SIZE", env.trace_size, 0, 1000000);
  return env;
}

}  // namespace

const Env& env() {
  static const Env env = read_env();
  return env;
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
  if (take_decimal(rest, number) && number > 0 && std::isfinite(number)) {
    for (const Unit& unit : kUnits) {
      if (rest == unit.word) return number * unit.bytes_per_second;
    }
  }
  throw Error("cannot read the rate \"" + text +
              "\": want a positive number and kbit, mbit, gbit, KB, MB or GB, such as 200mbit");
}

LinkRate parse_link_rate(const std::string& text) {
  if (text.empty()) return {};
  const size_t slash = text.find('/');
  const double send = parse_rate(text.substr(0, slash));
  return {send, slash == std::string::npos ? send : parse_rate(text.substr(slash + 1))};
}

}  // namespace pycomm
