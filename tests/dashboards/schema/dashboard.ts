// The dashboards that truespec writes, in the types of @grafana/schema: what its Dashboard leaves open (panels, their
// options, their queries) is closed here by panel type. make_schema.sh turns this into dashboard.schema.json.
import * as d from '@grafana/schema/dist/types/raw/dashboard/x/types.gen';
import * as bargauge from '@grafana/schema/dist/types/raw/composable/bargauge/panelcfg/x/types.gen';
import * as heatmap from '@grafana/schema/dist/types/raw/composable/heatmap/panelcfg/x/types.gen';
import * as stat from '@grafana/schema/dist/types/raw/composable/stat/panelcfg/x/types.gen';
import * as timeseries from '@grafana/schema/dist/types/raw/composable/timeseries/panelcfg/x/types.gen';

// Grafana's own type of a Prometheus query is not in the package.
interface PrometheusQuery {
  refId: string;
  datasource: d.DataSourceRef;
  expr: string;
  legendFormat: string;
  format?: 'time_series' | 'table' | 'heatmap';
  instant?: boolean;
  range?: boolean;
}

interface Fields<Custom> extends Omit<d.FieldConfigSource, 'defaults'> {
  defaults: Omit<d.FieldConfig, 'custom'> & { custom?: Custom };
}

interface OurPanel<Type extends string, Options, Custom>
  extends Omit<d.Panel, 'type' | 'options' | 'fieldConfig' | 'targets'> {
  type: Type;
  options: Options;
  fieldConfig: Fields<Custom>;
  targets: PrometheusQuery[];
}

type NoCustom = Record<string, never>;

type AnyPanel =
  | OurPanel<'timeseries', timeseries.Options, timeseries.FieldConfig>
  | OurPanel<'stat', stat.Options, NoCustom>
  | OurPanel<'bargauge', bargauge.Options, NoCustom>
  | OurPanel<'heatmap', heatmap.Options, heatmap.FieldConfig>;

// What Grafana's Prometheus data source reads of an annotation, which the package leaves open.
interface PrometheusAnnotation extends Omit<d.AnnotationQuery, 'target'> {
  target: { refId: string; expr: string; interval: string };
  titleFormat: string;
  textFormat: string;
}

export interface TruespecDashboard extends Omit<d.Dashboard, 'panels' | 'annotations'> {
  annotations: { list: PrometheusAnnotation[] };
  panels: (AnyPanel | (Omit<d.RowPanel, 'panels'> & { panels: AnyPanel[] }))[];
}
