#!/usr/bin/env bash
# Makes dashboard.schema.json from dashboard.ts and Grafana's own types (npm, @grafana/schema, Apache-2.0). Needs Node;
# run it by hand when GRAFANA below is raised: the tests need only what it made.
set -euo pipefail
GRAFANA=13.2.3
cd "$(dirname "$0")"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp dashboard.ts "$work"
echo '{"compilerOptions": {"strict": true, "module": "esnext", "moduleResolution": "node"}}' >"$work/tsconfig.json"
npm install --silent --no-audit --no-fund --prefix "$work" "@grafana/schema@$GRAFANA" ts-json-schema-generator@2.4.0 \
  typescript@5.9.3
(cd "$work" && npx --no-install ts-json-schema-generator --path dashboard.ts --type TruespecDashboard \
  --tsconfig tsconfig.json --expose none --minify -o raw.json)
# Grafana's comments on the fields are left out.
node - "$work/raw.json" "$GRAFANA" >dashboard.schema.json <<'JS'
const [file, version] = process.argv.slice(2);
const schema = JSON.parse(require('fs').readFileSync(file, 'utf8'));
schema.$comment = `Made by make_schema.sh from @grafana/schema ${version} (Apache-2.0, Grafana Labs).`;
console.log(JSON.stringify(schema, (key, value) => (key === 'description' && typeof value === 'string' ? undefined : value)));
JS
