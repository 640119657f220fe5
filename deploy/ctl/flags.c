/* ctl/flags.c - see flags.h. */
#include "deploy/ctl/flags.h"

#include "common/base/err.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

extern char **environ;

int ctl_flags_read(struct tow_opts **out, const struct tow_opts_spec *spec, int argc, char **argv,
                   struct tow_err *err)
{
    *out = NULL;
    enum tow_opts_do what = TOW_OPTS_RUN;
    int rc = tow_opts_new(out, spec, argc, (const char *const *)argv, (const char *const *)environ,
                          &what, err);
    if (rc < 0) return rc;
    if (tow_opts_tell(spec, what)) return CTL_FLAGS_DONE;
    return what == TOW_OPTS_CHECK ? CTL_FLAGS_CHECK : CTL_FLAGS_RUN;
}

/* A new file is made and removed; one that is there is only asked about, since opening a pipe would
 * block and its reader would see it close. */
int ctl_out_check(const char *flag, const char *path, struct tow_err *err)
{
    struct stat st;
    if (!path) return 0;
    const int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd >= 0) {
        close(fd);
        unlink(path);
        return 0;
    }
    int problem = errno;
    if (problem == EEXIST) {
        problem = access(path, W_OK) < 0 ? errno : 0;
        if (!problem && stat(path, &st) == 0 && S_ISDIR(st.st_mode)) problem = EISDIR;
    }
    return problem ? tow_fail(err, TOW_EIO, "%s %s: %s", flag, path, strerror(problem)) : 0;
}
