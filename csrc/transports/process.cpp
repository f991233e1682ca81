#include "transports/process.h"

#include <signal.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <vector>

#include "core/env.h"

namespace pycomm {
namespace {

/// Returns the fields of /proc/[pid]/stat by their numbers in proc(5); empty if there is no such
/// process.
std::vector<std::string> stat_of(const std::string& process) {
  std::ifstream file("/proc/" + process + "/stat");
  std::string line;
  std::getline(file, line);
  const size_t name_end = line.rfind(") ");  // a name may hold anything
  if (name_end == std::string::npos) return {};
  std::vector<std::string> fields = {"", line.substr(0, line.find(' ')), ""};
  std::istringstream rest(line.substr(name_end + 2));
  for (std::string field; rest >> field;) fields.push_back(field);
  return fields;
}

constexpr size_t kState = 3, kParent = 4, kThreads = 20, kBirth = 22;

/// True if the numbers in /proc are those of our PID namespace. In a sandbox that was given a
/// namespace of its own, and the /proc of another, they are those of other processes.
bool proc_is_ours() {
  char self[16] = {};
  const ssize_t length = ::readlink("/proc/self", self, sizeof self - 1);
  return length > 0 && std::to_string(::getpid()) == self;
}

/// The fields of another process of our namespace; empty also if they cannot be told.
std::vector<std::string> stat_of(pid_t process) {
  if (!proc_is_ours()) return {};
  return stat_of(std::to_string(process));
}

/// The scope in which process numbers mean the same: a machine and a PID namespace.
std::string place() {
  struct stat space = {};
  ::stat("/proc/self/ns/pid", &space);
  return machine_name() + "/" + std::to_string(space.st_dev) + "/" + std::to_string(space.st_ino);
}

/// Returns our own stat fields; empty if /proc belongs to another namespace.
std::vector<std::string> own_stat() {
  std::vector<std::string> fields = stat_of("self");
  if (fields.size() <= kBirth || fields[1] != std::to_string(::getpid())) fields.clear();
  return fields;
}

}  // namespace

pid_t parent_of(pid_t process) {
  const std::vector<std::string> fields = stat_of(process);
  return fields.size() > kParent ? static_cast<pid_t>(std::atoi(fields[kParent].c_str())) : 0;
}

bool is_stopped(pid_t process) {
  const std::vector<std::string> fields = stat_of(process);
  return fields.size() > kState && (fields[kState] == "T" || fields[kState] == "t");
}

std::string machine_name() {
  std::string boot;
  if (!(std::ifstream("/proc/sys/kernel/random/boot_id") >> boot)) return "";
  std::string name = env().host_id;
  utsname names = {};
  if (name.empty() && ::uname(&names) == 0) name = names.nodename;
  // The user may have given any characters; in published values these are separators.
  for (char& c : name) {
    if (std::isgraph(static_cast<unsigned char>(c)) == 0) c = '_';
  }
  return boot + "/" + name;
}

uint64_t process_birth() {
  const std::vector<std::string> fields = own_stat();
  return fields.empty() ? 0 : std::strtoull(fields[kBirth].c_str(), nullptr, 10);
}

std::string process_name() {
  const std::vector<std::string> fields = own_stat();
  return fields.empty() ? "" : place() + " " + fields[1] + " " + fields[kBirth];
}

Process::Process(pid_t id, std::string birth)
    : id_(id > 1 && id != ::getpid() ? id : 0), seen_(true), birth_(std::move(birth)) {}

Process::Process(const std::string& name) {
  std::istringstream words(name);
  std::string where;
  pid_t id = 0;
  if (!(words >> where >> id >> birth_) || id <= 1 || where != place()) return;
  if (id != ::getpid()) id_ = id;
  seen_ = is_here();
}

bool Process::dumps() const {
  if (id_ == 0 || !proc_is_ours()) return false;
  std::ifstream file("/proc/" + std::to_string(id_) + "/status");
  for (std::string line; std::getline(file, line);) {
    if (line.compare(0, 12, "CoreDumping:") == 0) return line.find('1') != std::string::npos;
  }
  return false;
}

bool Process::is_here() const {
  if (id_ == 0) return false;
  const std::vector<std::string> fields = stat_of(id_);
  return fields.size() > kBirth && fields[kBirth] == birth_;
}

bool Process::gone() const {
  if (id_ == 0) return false;
  if (::kill(id_, 0) != 0) return errno == ESRCH;
  const std::vector<std::string> fields = stat_of(id_);
  if (fields.size() <= kBirth) return false;  // it is hidden from us, or is just going
  if (!birth_.empty() && fields[kBirth] != birth_) return true;  // its number is another's now
  const bool ended = fields[kState] == "Z" || fields[kState] == "X";
  return ended && fields[kThreads] <= "1";  // otherwise only its first thread has ended
}

}  // namespace pycomm
