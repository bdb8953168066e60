# Installs lora-train on Windows; the options are those of install.py (--help).
# Usage: powershell -ExecutionPolicy Bypass -File install\install.ps1 [--yes] [--dry-run] [--gpu auto|cuda|cpu] [--uninstall]
# Not "Stop": Windows PowerShell 5.1 then ends at the first word that py writes to stderr.
$ErrorActionPreference = "Continue"
$installer = Join-Path $PSScriptRoot "install.py"
$check = "import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))"

foreach ($version in "-3.12", "-3.13", "-3.11") {
    if (Get-Command py -ErrorAction SilentlyContinue) {
        & py $version -c $check 2>$null
        if ($LASTEXITCODE -eq 0) {
            & py $version $installer @args
            exit $LASTEXITCODE
        }
    }
}
if (Get-Command python -ErrorAction SilentlyContinue) {
    & python -c $check 2>$null
    if ($LASTEXITCODE -eq 0) {
        & python $installer @args
        exit $LASTEXITCODE
    }
}
Write-Error "no Python 3.11 to 3.13 found; install one from python.org (with the launcher py)"
exit 1
