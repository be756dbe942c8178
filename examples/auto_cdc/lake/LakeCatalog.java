// SPDX-License-Identifier: Apache-2.0
package penstock.lake;

import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.apache.hadoop.conf.Configuration;
import org.apache.iceberg.Schema;
import org.apache.iceberg.Table;
import org.apache.iceberg.catalog.Namespace;
import org.apache.iceberg.catalog.TableIdentifier;
import org.apache.iceberg.hadoop.HadoopCatalog;
import org.apache.iceberg.spark.Spark3Util;
import org.apache.iceberg.spark.SparkSchemaUtil;
import org.apache.iceberg.spark.source.SparkTable;
import org.apache.spark.sql.catalyst.analysis.NoSuchNamespaceException;
import org.apache.spark.sql.catalyst.analysis.NoSuchTableException;
import org.apache.spark.sql.connector.catalog.CatalogV2Util;
import org.apache.spark.sql.connector.catalog.Column;
import org.apache.spark.sql.connector.catalog.Identifier;
import org.apache.spark.sql.connector.catalog.NamespaceChange;
import org.apache.spark.sql.connector.catalog.SupportsNamespaces;
import org.apache.spark.sql.connector.catalog.TableCatalog;
import org.apache.spark.sql.connector.catalog.TableChange;
import org.apache.spark.sql.connector.expressions.Transform;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/**
 * Iceberg tables in a folder, as a catalog of Spark 4.3.
 *
 * <p>Iceberg's newest runtime on Maven Central (1.12.0) is for Spark 4.1. Its own catalog does not load in Spark
 * 4.2 and later, where View became a class and a catalog may no longer hold tables and views both; its tables
 * do, but for one method. So this catalog hands out those tables, and nothing else of it is needed here.
 * Replace it by org.apache.iceberg.spark.SparkCatalog once a runtime for Spark 4.3 is published.
 */
public class LakeCatalog implements TableCatalog, SupportsNamespaces {
  private final HadoopCatalog tables = new HadoopCatalog();
  private String name;

  @Override
  public void initialize(String name, CaseInsensitiveStringMap options) {
    this.name = name;
    tables.setConf(new Configuration());
    tables.initialize(name, new HashMap<>(options.asCaseSensitiveMap()));
  }

  @Override
  public String name() {
    return name;
  }

  @Override
  public Identifier[] listTables(String[] namespace) {
    return tables.listTables(Namespace.of(namespace)).stream()
        .map(table -> Identifier.of(table.namespace().levels(), table.name()))
        .toArray(Identifier[]::new);
  }

  @Override
  public LakeTable loadTable(Identifier identifier) throws NoSuchTableException {
    try {
      return new LakeTable(tables.loadTable(icebergName(identifier)));
    } catch (org.apache.iceberg.exceptions.NoSuchTableException missing) {
      throw new NoSuchTableException(identifier);
    }
  }

  @Override
  public LakeTable createTable(
      Identifier identifier, Column[] columns, Transform[] partitions, Map<String, String> properties) {
    Schema schema = SparkSchemaUtil.convert(CatalogV2Util.v2ColumnsToStructType(columns));
    Map<String, String> own = new HashMap<>(properties);
    // These are Spark's words for where and what a table is; Iceberg has its own.
    own.keySet().removeAll(List.of(TableCatalog.PROP_PROVIDER, TableCatalog.PROP_LOCATION, TableCatalog.PROP_OWNER));
    return new LakeTable(
        tables
            .buildTable(icebergName(identifier), schema)
            .withPartitionSpec(Spark3Util.toPartitionSpec(schema, partitions))
            .withProperties(own)
            .create());
  }

  @Override
  public LakeTable alterTable(Identifier identifier, TableChange... changes) throws NoSuchTableException {
    List<TableChange> ofProperties = new ArrayList<>();
    List<TableChange> ofColumns = new ArrayList<>();
    for (TableChange change : changes) {
      boolean isProperty =
          change instanceof TableChange.SetProperty || change instanceof TableChange.RemoveProperty;
      (isProperty ? ofProperties : ofColumns).add(change);
    }
    Table table = loadTable(identifier).table();
    if (!ofColumns.isEmpty()) {
      Spark3Util.applySchemaChanges(table.updateSchema(), ofColumns).commit();
    }
    if (!ofProperties.isEmpty()) {
      Spark3Util.applyPropertyChanges(table.updateProperties(), ofProperties).commit();
    }
    return loadTable(identifier);
  }

  @Override
  public boolean dropTable(Identifier identifier) {
    return tables.dropTable(icebergName(identifier), true);
  }

  @Override
  public void renameTable(Identifier from, Identifier to) {
    throw new UnsupportedOperationException("a table in a folder keeps its name");
  }

  @Override
  public String[][] listNamespaces() {
    return tables.listNamespaces().stream().map(Namespace::levels).toArray(String[][]::new);
  }

  @Override
  public String[][] listNamespaces(String[] parent) {
    return parent.length == 0 ? listNamespaces() : new String[0][];
  }

  @Override
  public Map<String, String> loadNamespaceMetadata(String[] namespace) throws NoSuchNamespaceException {
    if (!tables.namespaceExists(Namespace.of(namespace))) {
      throw new NoSuchNamespaceException(namespace);
    }
    return Map.of();
  }

  @Override
  public void createNamespace(String[] namespace, Map<String, String> metadata) {
    tables.createNamespace(Namespace.of(namespace));
  }

  @Override
  public void alterNamespace(String[] namespace, NamespaceChange... changes) {
    throw new UnsupportedOperationException("a folder has no properties");
  }

  @Override
  public boolean dropNamespace(String[] namespace, boolean cascade) {
    return tables.dropNamespace(Namespace.of(namespace));
  }

  private static TableIdentifier icebergName(Identifier identifier) {
    return TableIdentifier.of(Namespace.of(identifier.namespace()), identifier.name());
  }

  /** An Iceberg table whose columns are told the way Spark 4.3 asks. */
  public static class LakeTable extends SparkTable {
    LakeTable(Table table) {
      super(table);
    }

    @Override
    public Column[] columns() {
      return CatalogV2Util.structTypeToV2Columns(schema(), false);
    }
  }
}
