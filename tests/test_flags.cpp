// SPDX-License-Identifier: Apache-2.0
// Flags, exit codes, and the files of a run other than checkpoints.
#include "programs.hpp"

#include <sys/ioctl.h>
#include <sys/stat.h>

#include "base/new_file.hpp"
#include "images/image.hpp"
#include "run/log.hpp"

using namespace yolox;
using namespace yolox::test;

namespace {

struct SomeFlags : Flags {
  int bs = flag(bs, "Training", "bs", 16, "N", "images in a step");
  int64_t seed = flag(seed, "Training", "seed", int64_t{7}, "N", "of everything");
  double lr = flag(lr, "Training", "lr", 0.01 / 64, "X", "learning rate");
  bool strict = flag(strict, "Data", "strict", false, "", "stop at bad labels");
  bool mosaic = flag(mosaic, "Data", "mosaic", true, "", "four images in one");
  std::string name = flag(name, "Data", "name", "", "NAME", "a name");
  std::string resume = flag(resume, "Data", "resume", "", "RUN", "go on", FlagFacts{.implicit = "newest"});
};

// Returns the message of the error, or "" if the words are accepted.
std::string refusal(const std::vector<std::string>& words) {
  SomeFlags flags;
  return error_of([&] { parse(flags, words); });
}

}  // namespace

TEST_CASE("flags: --name value or --name=value, the last one wins; --name and --no-name turn on and off") {
  SomeFlags s;
  parse(s,
        {"--bs", "4", "--lr=1e-3", "--seed", "-9000000000", "--name", "--batch a=c", "--bs=5", "--strict"});
  CHECK(concat(s.bs, " ", s.lr, " ", s.seed, " ", s.strict, s.mosaic) == "5 0.001 -9000000000 11");
  CHECK(s.name == "--batch a=c");  // a value may look like a flag
  CHECK(s.was_given("bs"));
  CHECK_FALSE(s.was_given("mosaic"));
  SomeFlags undone;  // a resumed run can undo its original switches
  parse(undone, {"--no-mosaic", "--no-strict"});
  CHECK_FALSE((undone.mosaic || undone.strict));
  CHECK((undone.was_given("mosaic") && undone.was_given("strict")));
  using Words = std::vector<std::string>;
  for (const auto& [words, value] :
       {std::pair(Words{"--resume"}, "newest"),
        {{"--resume", "--bs", "2"}, "newest"},
        {{"--resume=runs/a"}, "runs/a"},
        {{"--resume", "runs/a", "--bs", "2"}, "runs/a"},
        {{"--resume", "runs/a", "--resume=auto"}, "auto"}}) {  // as the launcher resumes a run
    SomeFlags resumed;
    parse(resumed, words);
    CHECK(resumed.resume == value);
  }
}

TEST_CASE("flags: what is no flag or no value is refused by name, with the flag for other trainers' names") {
  const std::string help = "; --help lists the flags";
  using Words = std::vector<std::string>;
  for (const auto& [words, text] :
       {std::pair(Words{"word"}, std::string("unexpected argument 'word'")),
        {{"--mosaic", "false"}, "unexpected argument 'false'"},
        {{"--", "word"}, "unexpected argument 'word'"},
        {{"--strict=false"}, "--strict is a switch and takes no value, got 'false'"},
        {{"--no-mosaic=false"}, "--no-mosaic is a switch"},
        {{"--bs_=1"}, "there is no flag --bs_" + help},
        {{"--imgsz", "64"}, "there is no flag --imgsz" + help},  // no --size here
        {{"--batch_size=4"}, "there is no flag --batch_size; use --bs"},
        {{"-b", "4"}, "there is no flag -b; use --bs"},
        {{"-hx"}, "there is no flag -x" + help},
        {{"--keep-going"}, "--keep-going is gone: --resume RUN"},
        {{"--bs"}, "is missing an argument" + help},
        {{"--bs=0x10"}, "--bs must be an integer, got '0x10'"},
        {{"--bs=99999999999"}, "'99999999999'"},
        {{"--lr", "1,5"}, "--lr must be a number, got '1,5'"},
        {{"--lr", "nan"}, "--lr must be a number, got 'nan'"},
        {{"--lr", "1e999"}, "--lr must be a number, got '1e999'"}})
    CHECK_MESSAGE(has(refusal(words), text), words[0] << ": " << refusal(words));
}

TEST_CASE("flags: --size is S or HxW, a multiple of 32") {
  CHECK((parse_size("640").height == 640 && parse_size("640").width == 640));
  CHECK((parse_size("480x640").height == 480 && parse_size("480x640").width == 640));
  for (const std::string text : {"", "x", "640x", "x640", "640x100", "0", "-32", "640x640x3", "640 480",
                                 "64.0", "640a", "16384", " 640", "+640"})
    CHECK_MESSAGE(has(error_of([&] { parse_size(text); }), "up to 8192, got '" + text + "'"), text);
}

TEST_CASE("flags: exit codes are 0, 2 for a wrong command line, 1 for other errors; one line, no backtrace") {
  using Said = std::pair<int, std::string>;
  CHECK(outcome([] {}) == Said(0, ""));
  CHECK(outcome([] { throw UsageError("--bs is odd"); }) == Said(2, "error: --bs is odd\n"));
  CHECK(outcome([] { fail("a.json is empty"); }) == Said(1, "error: a.json is empty\n"));
  CHECK(outcome([] { TORCH_CHECK(false, "shapes differ"); }) == Said(1, "error: shapes differ\n"));
  CHECK(outcome([] { fail("no memory\nframe #0: c10::alloc_cpu"); }).second == "error: no memory\n");
  CHECK(has(outcome([] { torch::empty({1L << 50}); }).second, "error: out of memory; give a smaller --bs"));
  CHECK_HAS(outcome([] { throw std::system_error(EAGAIN, std::generic_category()); }).second,
            "error: cannot start a thread: Resource temporarily unavailable; raise the limit of processes");
}

TEST_CASE("run: metrics.csv has all digits; repeated rows are removed; a new column begins metrics_2.csv") {
  TempDir dir;
  const std::string run = dir.path.string(), path = dir / "metrics.csv", second = dir / "metrics_2.csv",
                    head = "epoch,iteration,loss,AP\n", first = "1,2198917,2,\n", ap = "1,2198917,,0.5\n",
                    next = "2,2198918,1.5,\n", torn = "3,21989";
  const int64_t all = 9999999;
  const auto row = [](double epoch, double iteration, double loss, double ap) {
    return Metrics::Row{{"epoch", epoch}, {"iteration", iteration}, {"loss", loss}, {"AP", ap}};
  };
  Metrics(run, all).row(row(1, 2198917, 2, std::nan("")));
  Metrics m(run, all);
  m.row({{"AP", 0.5}, {"iteration", 2198917}, {"epoch", 1}});
  m.row(row(2, 2198918, 1.5, std::nan("")));
  CHECK(contents(path) == head + first + ap + next);
  CHECK(has(error_of([&] { m.row({{"epoch", 1}, {"loss", 2}, {"loss", 3}}); }), "already has a column loss"));
  append_text(path, torn);
  const auto open_files = entries_of("/proc/self/fd");
  on_full_disk(10, [&] {
    append_text(dir / "log.txt", "too long for the room\n");
    append_text(dir / "log.txt", "two\n");
    Metrics(run, 0);
    return replace_file(path, "much longer than the room there is");
  });
  CHECK(contents(path) == head + first + ap + next + torn);
  CHECK(contents(dir / "log.txt") == "two\n");
  CHECK(entries_of("/proc/self/fd") == open_files);
  for (const auto& [step, left] :
       {std::pair(2198918, first + ap + next), {2198917, first + ap}, {0, std::string()}}) {
    Metrics(run, step);
    CHECK(contents(path) == head + left);
  }
  write_text(path, head + first + next);
  Metrics(run, 2198917);
  CHECK(contents(path) == head + first);
  Metrics(run, all).row({{"epoch", 1}, {"iteration", 2}, {"loss", 3}, {"new", 4}});
  Metrics(run, all).row({{"epoch", 1}, {"iteration", 3}, {"new", 5}});
  CHECK(contents(path) == head + first);
  CHECK(contents(second) == "epoch,iteration,loss,new\n1,2,3,4\n1,3,,5\n");
  Metrics(run, 2);
  CHECK(contents(second) == "epoch,iteration,loss,new\n1,2,3,4\n");
  CHECK(contents(path) == head);
}

TEST_CASE("files: a new file replaces the old one only on commit; temporary names contain the process id") {
  TempDir dir;
  write_text(dir / "a", "old");
  std::filesystem::create_symlink("a", dir / "link");
  {
    NewFile file(dir / "link");
    file.write("half");
    CHECK(has(file.temporary_path(), concat("a.tmp.", getpid())));
    CHECK(contents(dir / "a") == "old");
  }
  CHECK(entries_of(dir / "") == std::set<std::string>{"a", "link"});
  NewFile file(dir / "link");
  file.write("new");
  std::fputs("er", file.stream());
  file.commit();
  CHECK(contents(dir / "a") == "newer");
  CHECK((std::filesystem::is_symlink(dir / "link") && entries_of(dir / "").size() == 2));
  CHECK_HAS(error_of([&] { NewFile file(dir / "none/a"); }),
            "cannot write " + (dir / "none/a") + ": No such");
  CHECK(has(error_of([&] { NewFile file(dir.path.string()); }), "Is a directory"));
  // A pipe or a device must be written to, not replaced. The test uses its own pipe, because a bug would
  // replace a device of the machine.
  REQUIRE(mkfifo((dir / "pipe").c_str(), 0600) == 0);
  std::filesystem::create_symlink("pipe", dir / "link_to_pipe");
  const int reader = open((dir / "pipe").c_str(), O_RDONLY | O_NONBLOCK);
  CHECK(replace_file(dir / "link_to_pipe", "text"));
  char text[8] = "";
  CHECK((read(reader, text, sizeof text) == 4 && text == std::string("text")));
  close(reader);
}

TEST_CASE("files: a path that may not be entered is not said to be missing") {
  TempDir dir;
  write_text(dir / "closed/file");
  REQUIRE((chmod(dir.path.c_str(), 0755) == 0 && chmod((dir / "closed").c_str(), 0) == 0));
  const AtEnd root([user = geteuid()] { CHECK(seteuid(user) == 0); });
  if (geteuid() == 0) REQUIRE(seteuid(65534) == 0);  // root may enter it
  CHECK(why_missing(dir / "none") == "does not exist");
  CHECK(why_missing(dir / "closed/file") == "cannot be read: Permission denied");
  CHECK_HAS(error_of([&] { read_pth(dir / "closed/file"); }),
            "closed/file: cannot be read: Permission denied");
}

TEST_CASE("programs: the soft limit of open files is raised to the hard limit") {
  rlimit before, after;
  REQUIRE(getrlimit(RLIMIT_NOFILE, &before) == 0);
  rlimit low = before;
  low.rlim_cur = std::min<rlim_t>(64, before.rlim_max);
  REQUIRE(setrlimit(RLIMIT_NOFILE, &low) == 0);
  CHECK(run_program([] {}) == 0);
  REQUIRE(getrlimit(RLIMIT_NOFILE, &after) == 0);
  CHECK(after.rlim_cur == before.rlim_max);
  setrlimit(RLIMIT_NOFILE, &before);
}

TEST_CASE("run: signals are recorded every time and restart interrupted system calls") {
  std::map<int, struct sigaction> before;
  for (const int signal : {SIGTERM, SIGUSR1, SIGINT}) sigaction(signal, nullptr, &before[signal]);
  catch_signals();
  for (const int signal : {SIGUSR1, SIGINT, SIGTERM, SIGTERM}) {
    if (signal == SIGINT) stop_signal = 0;  // a second Ctrl-C ends the process
    std::raise(signal);
    CHECK(stop_signal == signal);
    struct sigaction now {};
    sigaction(signal, nullptr, &now);
    CHECK((now.sa_flags & SA_RESTART) != 0);
  }
  stop_signal = 0;
  for (const auto& [signal, action] : before) sigaction(signal, &action, nullptr);
}

TEST_CASE("run: the progress line is rewritten in place, cut to the terminal; files and TERM=dumb omit it") {
  TempDir dir;
  const int out = dup(1), pty = posix_openpt(O_RDWR | O_NOCTTY);
  REQUIRE((pty >= 0 && grantpt(pty) == 0 && unlockpt(pty) == 0));
  const int terminal = open(ptsname(pty), O_RDWR | O_NOCTTY),
            file = open((dir / "out").c_str(), O_WRONLY | O_CREAT, 0600);
  const winsize window{5, 9, 0, 0};
  ioctl(terminal, TIOCSWINSZ, &window);
  std::cout << std::flush;
  for (const auto& [fd, type] : {std::pair(terminal, "xterm"), {file, "xterm"}, {terminal, "dumb"}}) {
    const Env of_terminal("TERM", type);
    dup2(fd, 1);
    Log log(dir / "log.txt");
    log.line("begin");
    log.progress("1 \u4eba many steps", false);  // cut between characters
    log.progress("2", false);
    log.line("note");
    log.progress("3 of 3", true);
  }
  dup2(out, 1);
  for (const int fd : {out, terminal, file}) close(fd);
  std::string shown;
  for (char c; read(pty, &c, 1) == 1;) shown += c;
  close(pty);
  CHECK(shown ==
        "begin\r\n\r\033[K1 \u4eba many\r\033[K2\r\033[Knote\r\n3 of 3\r\n"
        "begin\r\nnote\r\n3 of 3\r\n");
  const std::string lines = "begin\nnote\n3 of 3\n";
  CHECK(contents(dir / "out") == lines);
  CHECK(contents(dir / "log.txt") == lines + lines + lines);
}
