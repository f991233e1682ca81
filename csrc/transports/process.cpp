#include "transports/process.h"

#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <sstream>
#include <vector>

namespace pycomm {
namespace {

/// The fields of /proc/[pid]/stat by their numbers in proc(5); empty if there is none.
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

constexpr size_t kState = 3, kThreads = 20, kBirth = 22;

/// Where process numbers mean the same: a running kernel and a PID namespace.
std::string place() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  struct stat space = {};
  ::stat("/proc/self/ns/pid", &space);
  return boot + "/" + std::to_string(space.st_dev) + "/" + std::to_string(space.st_ino);
}

}  // namespace

std::string process_name() {
  const std::vector<std::string> fields = stat_of("self");
  // /proc may be another namespace's.
  if (fields.size() <= kBirth || fields[1] != std::to_string(::getpid())) return "";
  return place() + " " + fields[1] + " " + fields[kBirth];
}

Process::Process(const std::string& name) {
  std::istringstream words(name);
  std::string where;
  pid_t id = 0;
  if (!(words >> where >> id >> birth_) || id <= 1 || where != place()) return;
  if (id != ::getpid()) id_ = id;
}

bool Process::died() const {
  if (id_ == 0) return false;
  if (::kill(id_, 0) != 0) return errno == ESRCH;
  const std::vector<std::string> fields = stat_of(std::to_string(id_));
  if (fields.size() <= kBirth) return false;  // it is hidden from us, or is just going
  if (fields[kBirth] != birth_) return true;  // its number is another's now
  const bool ended = fields[kState] == "Z" || fields[kState] == "X";
  return ended && fields[kThreads] <= "1";  // else only its first thread has ended
}

}  // namespace pycomm
